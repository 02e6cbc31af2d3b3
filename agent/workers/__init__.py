"""This node's workers: started, heard on their links, signalled."""
