"""A mesh as one SVG picture: ranks on nodes, memory and time by term, the pipeline schedule. Imports no torch.

svg.py             shapes and texts of an SVG file
rank_layout.py      coordinates, groups and nodes of ranks, from the order of the axes
rank_panel.py      nodes with their ranks, and the table of the axes
term_bar.py        a stacked bar of an estimate's terms
schedule_panel.py  timeline of a pipeline schedule
mesh_picture.py    the whole picture, of a plan or of a run
"""
