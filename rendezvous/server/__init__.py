"""The store that a job serves itself, where the user has no etcd."""
