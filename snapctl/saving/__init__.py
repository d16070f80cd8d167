"""Saving: staging through torchsnapshot, corrected; our own writes, checksums and commit."""
