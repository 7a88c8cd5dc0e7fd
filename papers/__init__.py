"""The experiments behind the pages: a folder for each paper and each model that ships, run from a checkout."""
