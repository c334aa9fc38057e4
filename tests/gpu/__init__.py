"""What is looked at once a machine has a GPU; nothing here runs in `make test`. See check.sh."""
