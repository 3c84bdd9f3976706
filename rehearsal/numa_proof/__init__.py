"""The proof on four NUMA nodes: a QEMU machine laid out as inf2.48xlarge, and the planner's commands in it.

A machine with one NUMA node cannot show that a binding works. QEMU emulates the nodes (no hardware help is
needed), a Debian kernel boots in it, and a small system in its memory runs the real reading of the host, the
real plan, the real numactl command of each raylet, and the real claim of each replica.
"""
