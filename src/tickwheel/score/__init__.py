"""The scheduling contest: what running jobs at their time costs a database, and how late they are.

contest    the rules: which jobs come when, and what counts; pure
servers    the servers that entrants need, on free ports, in a folder of the contest
instance   one instance of one entrant, in a process of its own
polling    entrants that poll a table in PostgreSQL
tickwheels entrants that run Tickwheel on a store
entrants   who takes part
run        one contest: servers, instances, jobs, kills, and the record
report     the leaderboard as a table, JSON, Markdown and a workbook
"""
