"""What commands show: documents of tables and plots, and HTML pages that need no network."""
