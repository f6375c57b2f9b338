"""A stand-in Neuron toolchain for CPUs: same files, same command lines, same logs, really training the model.

`toolchain/` is what a `NeuronToolchain` block points to; its commands are this package's modules, run by the
interpreter in `REHEARSAL_PYTHON`. What is real: the parallel layout and its rules, the shards that are read and
written, the data module, the optimizer, the checkpoints, several nodes training in step. What is not: the device. One
process per node stands for all the node's ranks and computes in fp32 on one CPU thread, which makes every run
repeatable bit by bit.
"""
