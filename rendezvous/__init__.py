"""The rendezvous: the nodes of a generation and their ranks, as pure rules over a store interface; and the stores."""
