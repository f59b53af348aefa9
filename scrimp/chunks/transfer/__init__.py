"""Host memory, copies between host and device, collectives between ranks."""
