"""This agent's talk with the job's store: reads, transactions, leases, watches."""
