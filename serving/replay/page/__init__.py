"""Reports as HTML pages with plotly charts. Needs the extra `report`."""

from pipeline.extras import brought_by

with brought_by("report", by=__name__):
    from .page import pareto_page, report_page, scaling_page, sweep_page

__all__ = ["pareto_page", "report_page", "scaling_page", "sweep_page"]
