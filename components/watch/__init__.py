"""Detection of hung runs, stop requests, and fault injection.

watchdog.py   ends a run that makes no progress; reports the missing rank, all stacks and the last collectives;
              StopRequest: stop signals, agreed on by all ranks
heartbeat.py  periodic status of each rank in the store, and the ranks and devices that the others wait for
faults.py     named points at which a test can kill or fail a save or a load, or flip a bit
"""
