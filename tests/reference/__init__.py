"""The truth that tests compare with, written from the paper's definitions and apart from `kronfac`."""
