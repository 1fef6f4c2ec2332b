"""One function over many items: here, in processes or on a cluster; and what an interrupt leaves to be
done.
"""
