"""`kronfac bench ordinary`: K-FAC as it comes beside AdamW with a tuned learning rate, in equal seconds."""
