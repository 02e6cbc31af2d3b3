import model


class Data:
    pass
