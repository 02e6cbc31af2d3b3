"""Where the job's store is, who serves it, and how every node gets its secret."""
