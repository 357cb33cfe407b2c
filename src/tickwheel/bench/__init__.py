"""`tickwheel bench`: the same work on every store and with other libraries, measured side by side.

Each library runs as its users run it: a program that adds jobs, and its own worker command, in its
own environment. Every figure is about what these processes did, seen from outside.
"""
