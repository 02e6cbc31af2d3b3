"""This agent's requests to the job's store: reads, transactions, leases, watches."""
