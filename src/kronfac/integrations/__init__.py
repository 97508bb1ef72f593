"""K-FAC in other libraries: one module for each, which imports its library only when it is used."""
