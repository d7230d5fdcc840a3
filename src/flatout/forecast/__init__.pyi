from flatout.forecast.network import Collective as Collective
from flatout.forecast.network import Link as Link
from flatout.forecast.network import Network as Network
from flatout.forecast.network import parse_network as parse_network
from flatout.forecast.network import parse_rate as parse_rate
from flatout.forecast.network import parse_seconds as parse_seconds
