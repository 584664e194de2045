"""Where tasks come from, one file for each kind; the file's name is the kind, its class is `Source`. The contract is in
`gnomon.agent.task_source`."""
