"""The documentation: generated pages of docs/, and the site. `python -m scripts._docs` writes and builds them.

keys.py      reference of the keys, from the schema dataclasses
options.py   options of the config groups and the values of each recipe, from conf/
refusals.py  messages of rejected configs, from the source of the rules
walks.py     the six walks of the architecture page, and their pictures
site.py      the build, and the check of all links of the built site
"""
