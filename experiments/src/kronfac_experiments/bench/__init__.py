"""`kronfac bench …`: what K-FAC costs and what it gains, measured. A file a command."""
