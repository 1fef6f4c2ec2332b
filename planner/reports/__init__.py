"""A plan, a validation or a comparison as something to read: words, tables, charts, one page of HTML."""
