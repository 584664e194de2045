"""One file per way of isolating a program: `namespaces` (the default), `gvisor`, `microvm`, `e2b`."""
