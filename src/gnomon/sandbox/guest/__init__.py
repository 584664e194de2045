"""The agent inside machines with a kernel of their own (gVisor, a microVM), and the host's end of its channel."""
