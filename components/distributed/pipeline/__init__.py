"""Pipeline parallelism.

schedule.py      Pipeline: this rank's stages under torch's schedules
stages.py        cut_into_stages: the parts of a model
placeholders.py  modules in the place of those that another stage has
"""
