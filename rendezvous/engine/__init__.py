"""etcd's semantics in this process: keys, revisions, leases, transactions."""
