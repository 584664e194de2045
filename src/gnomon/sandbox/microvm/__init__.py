"""Parts of the `microvm` backend: the guest's kernel and first program, its drives, qemu and the way to talk to it, one machine."""
