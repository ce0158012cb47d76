"""Pipeline parallelism.

schedule.py  Pipeline: this rank's stages under torch's schedules
stages.py    cut_into_stages: splits a model into stages, with placeholders for the others' modules
"""
