"""What ran: every collective of every rank, held against the sequence that a step has, and who is to blame.

with record("trace") as recording:                       # a program of one's own; `tangram train` traces by itself
    torch.distributed.init_process_group(recording.backend)
    ...
traces = read("trace")                                   # also while it runs, and after it was killed
for finding in findings(traces):
    print(finding.text)
"""

from tangram.tracing.blame import findings
from tangram.tracing.files.format import Phase
from tangram.tracing.finding import Finding
from tangram.tracing.reading import RankTrace, read
from tangram.tracing.settings import Recording, record

__all__ = ["Finding", "Phase", "RankTrace", "Recording", "findings", "read", "record"]
