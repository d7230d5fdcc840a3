from flatout.hooks.compiling import is_anything_compiled as is_anything_compiled
from flatout.hooks.compiling import skip_our_frames as skip_our_frames
from flatout.hooks.modules import SEARCH_STEPS as SEARCH_STEPS
from flatout.hooks.modules import ModuleCalls as ModuleCalls
from flatout.hooks.wrapping import ORDER as ORDER
from flatout.hooks.wrapping import Hook as Hook
from flatout.hooks.wrapping import wrap as wrap
from flatout.importing import when_imported as when_imported
