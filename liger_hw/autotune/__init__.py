"""Finding, storing and sharing launch configurations.

Below the registry, which reads them at the first launch:
    tables, store      the text form of a table; the user cache and the shipped tables, read as one table of a device,
                       and what a process notes there for later ones
    lock               a job's pinned configurations

Above it, for `liger-hw autotune`, `compile` and `lock`:
    models, jobs       the jobs to tune for a model, op or miss
    space              the legal configurations of a tunable, and which of them to try
    compile, ttir      launches recorded and compiled for a GPU that is not here; accesses read from their TTIR
    workers            the processes that compile and measure
    fake, record       tensors without memory; recording an op's launches, on fake tensors or on the device
    clock, measure     timing on a device; a kernel's launches timed, after `check` compared their results
    tuner, static      the search by measuring; the choice by a model where there is no device
    compile_ahead      kernels compiled in parallel with a model's first forward, or with an op's first call
"""

compiles_ahead = ""
"""Full name of the module that compiles the kernels of an op's first call in parallel. The package's root sets it:
that module imports the registry."""
