"""The file of the disk tier, and the threads that read and write it."""
