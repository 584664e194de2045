"""Parts of the gVisor backend: the `runsc` program, the bundle that it starts, its control groups."""
