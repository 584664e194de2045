"""The parts of the `namespaces` backend; start with `zygote.py`. What runs inside a sandbox imports these small modules only."""
