"""Programs that run inside machines. They import nothing but Python's standard library, and gnomon reads them as text as well."""
