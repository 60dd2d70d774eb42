"""Workloads -> timings -> table, JSON and plots: what `liger-hw bench` runs, as functions.

timing.py         how a call is measured: graph replay, eager wall time, host time, memory, floors
runners.py        what takes turns in a measurement
cases.py          what is measured: an op at sizes; the lists of many shapes
peers/            the same computation by torch, torch.compile, Liger, quack and CCE, a file each
accuracy.py       error of an arm against the reference in fp64
floors.py         the least time a case can take
chunked.py        the chunked losses as cases
share.py          one list of cases, several processes
ops.py            case x peer -> rows
report.py         machine facts, table, JSON
plots.py          plots
registry_cost.py  what a registry hit costs
host.py           where a call's host time goes
e2e.py            real Hugging Face models, trained
"""
