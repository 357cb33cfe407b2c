"""An outside-in judge: real workers, random faults, and a record kept outside the store.

    load.py      what is enqueued, when, and what each job should do: a pure function of the seed
    faults.py    what goes wrong, when and with whom: a pure function of the seed
    record.py    what the processes themselves say happened, line by line, on disk
    shop.py      the app that the workers run; producer.py enqueues into it
    scenes.py    the stores, their servers, and how each fault is brought about
    run.py       one run: processes, faults, and the end when the store is drained
    busy.py      whether the machine itself had no time for a process
    verdict.py   the judge: a pure function over the record

Nothing is taken from the store but its last word on each job, which has to agree with the record.
"""
