"""Child processes with limits: services of this project, and programs of strangers.

host        in the child: imports a service once, forks a process per caller, answers requests
children    in the caller: starts the host, asks children with a time limit, kills what does not answer
workers     children that each answer one request at a time, for checks that may hang or crash
sandbox     one untrusted program in a process that may compute and print, and nothing else
"""
