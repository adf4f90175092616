"""The routes of `/admin`, for keys with the scope admin."""

from __future__ import annotations

from coserve.api.access.handlers import AdminApi
from coserve.api.http.route import BODY_ERRORS, BUSY, Route
from coserve.core.access.schemas import ApiKey, CreateKey, KeyList, LogLevel, NewKey, Quota, QuotaList


def admin_routes(api: AdminApi) -> tuple[Route, ...]:
    body = (422, *BODY_ERRORS, BUSY)
    return (
        Route(
            "POST",
            "/admin/keys",
            api.create_key,
            "Create an API key",
            body=CreateKey,
            response=NewKey,
            status=201,
            errors=(*body, 507),
        ),
        Route("GET", "/admin/keys", api.list_keys, "List API keys, revoked ones too, oldest first", response=KeyList),
        Route(
            "DELETE",
            "/admin/keys/{id}",
            api.revoke_key,
            "Revoke an API key; its requests in progress are cut off",
            response=ApiKey,
            errors=(404, 507),
        ),
        Route("GET", "/admin/quotas", api.list_quotas, "List the quotas of projects", response=QuotaList),
        Route(
            "PUT",
            "/admin/quotas/{id}",
            api.set_quota,
            "Replace the quota of a project",
            body=Quota,
            response=Quota,
            errors=(404, *body, 507),
        ),
        Route(
            "PUT",
            "/admin/log-level",
            api.set_log_level,
            "Change the log level until the daemon ends",
            body=LogLevel,
            response=LogLevel,
            errors=body,
        ),
    )
