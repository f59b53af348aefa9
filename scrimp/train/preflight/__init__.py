"""What a run needs of the machine, checked before weights are loaded: memory, /dev/shm, disks, torch."""
