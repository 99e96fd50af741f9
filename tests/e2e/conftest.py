import pytest

from serving import Server


@pytest.fixture(scope="module")
def server(nibble, tiny):
    """The embedded model, called tiny, for who has the key k; files with other wishes have a fixture of their own."""
    s = Server(nibble, tiny, "--alias", "tiny", "--api-key", "k")
    yield s
    s.close()
