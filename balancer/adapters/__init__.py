"""One file for each framework that the balancer reads from or acts on; the framework is imported on use."""
