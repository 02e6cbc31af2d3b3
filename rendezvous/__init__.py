"""Who is in a generation, which ranks they have: pure rules over a store interface."""
