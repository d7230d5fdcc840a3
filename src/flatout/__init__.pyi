from flatout import cures as cures
from flatout import data as data
from flatout import errors as errors
from flatout import integrations as integrations
from flatout import measure as measure
from flatout import optim as optim
from flatout import recipe as recipe
from flatout import report as report
from flatout import save as save
from flatout import train as train
from flatout.devices import pin as pin
from flatout.models import freeze as freeze
from flatout.models import unfreeze as unfreeze
from flatout.optim import LrRule as LrRule
from flatout.recipe import Recipe as Recipe
from flatout.report.notebook import load_ipython_extension as load_ipython_extension
from flatout.report.notebook import unload_ipython_extension as unload_ipython_extension
from flatout.train.callbacks import Callback as Callback
from flatout.train.callbacks import EarlyStopping as EarlyStopping
from flatout.train.callbacks import Unfreeze as Unfreeze
from flatout.train.history import History as History
from flatout.train.loop import Loop as Loop
from flatout.train.part import Part as Part
from flatout.train.part import Step as Step
from flatout.train.trainer import Trainer as Trainer

__version__: str
