"""A client of etcd v3, over its JSON gateway or gRPC."""
