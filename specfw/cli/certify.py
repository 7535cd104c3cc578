NAME = "certify"
def command() -> None:
    """x"""
