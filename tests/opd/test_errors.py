from opd import errors


def test_every_error_has_an_exit_code_above_one() -> None:
    assert all(cls.exit_code > 1 for cls in errors.all_errors())


def test_statuses_come_back_as_the_class_that_sent_them() -> None:
    for cls in errors.all_errors():
        shared = (errors.NonFiniteError, errors.DeviceMemoryError, errors.UndecidedTeacherError)
        if cls.status is not None and cls not in shared:
            back = errors.from_status(cls.status, "message")
            assert type(back) is cls, cls
            assert str(back) == "message"


def test_an_unknown_status_counts_as_an_unavailable_replica() -> None:
    assert isinstance(errors.from_status("DATA_DROUGHT", "x"), errors.UnavailableError)


def test_internal_is_nobodys_status() -> None:
    assert all(cls.status != "INTERNAL" for cls in errors.all_errors())
