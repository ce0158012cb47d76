"""What keeps a run alive, or ends it in order.

watchdog.py         ends a run that makes no progress, and names the rank that is missing
heartbeat.py        what ranks post of themselves, and which of them the others wait for
flight_recorder.py  the collectives that were under way when a run hung
frames.py           frames of running Python code, for the report of a hung rank
stop_requests.py    StopRequest: signals, and what all ranks agreed on
gc.py               Python's garbage is collected between steps
faults.py           named points at which a test kills a save or lets it fail
"""
