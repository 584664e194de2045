"""Parts of the `e2b` backend: a sandbox on another machine as one of ours."""
