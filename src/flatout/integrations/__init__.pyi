from flatout.integrations.hugging_face import HFTimeline as HFTimeline
from flatout.integrations.keras import KerasTimeline as KerasTimeline
from flatout.integrations.lightning import LightningTimeline as LightningTimeline
